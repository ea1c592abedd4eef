"""What stands beside the workers of one host, whatever starts it there."""
