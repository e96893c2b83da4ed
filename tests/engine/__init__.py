"""Engines have a folder of their own: shutting one down ends every child of the test process, and
with it any server that another test had started."""
