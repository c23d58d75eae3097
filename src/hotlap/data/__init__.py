"""How a batch reaches the device."""
