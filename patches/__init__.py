"""Every change that is made to SGLang: one module per seam, each with a ledger entry."""
