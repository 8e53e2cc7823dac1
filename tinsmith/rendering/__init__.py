"""From the chunks of a ModelInput to token ids, image spans and pixel values: the only place that does this."""
