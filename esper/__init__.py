"""Neural networks that grow while they train, under a learned controller."""
