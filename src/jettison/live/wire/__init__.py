"""What the controller and its workers agree on: messages, their bytes, the control channel, heartbeats."""
