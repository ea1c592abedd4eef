"""What steps and moves cost, predicted."""
