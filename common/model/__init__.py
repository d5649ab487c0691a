"""The model as one flat vector and as a safetensors file."""
