"""Numbers of eight bits: the formats and their scales, and the linears that multiply them."""
