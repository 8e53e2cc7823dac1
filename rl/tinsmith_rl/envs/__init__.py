"""The environments that come with Tinsmith. They are short, to be read as examples."""
