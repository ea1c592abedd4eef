"""Front ends in processes of their own: what they and the controller say to each other, in token ids."""
