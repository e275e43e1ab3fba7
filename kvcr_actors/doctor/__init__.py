"""What a machine offers a controller, and what stands in its way: facts are read once, checks only judge them."""
