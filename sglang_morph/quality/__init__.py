"""`sglang-morph quality`: what each precision level does to the answers."""
