"""torch's side: operators, F.scaled_dot_product_attention, its swap point for flash attention."""
