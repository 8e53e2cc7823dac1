"""The environments that come with Tinsmith. Each is one short file, to be read as an example."""
