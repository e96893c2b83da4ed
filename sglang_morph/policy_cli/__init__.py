"""`sglang-morph policy`: try policies on recordings and in simulation, without a server."""
