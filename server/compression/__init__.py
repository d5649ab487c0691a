"""What the server does where vectors are sent compressed: the model that devices hold."""
