"""What `argusrl cluster doctor` looks at, one file for each part of a cluster."""
