"""Ways to lie a model out on devices, one a file, on Lightning's strategies."""
