"""What algorithms of local training keep on a device between rounds."""
