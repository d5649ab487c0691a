"""Takes tasks that a server hands out, if the device's owner trusts who signed them."""
