"""Model + data + objective -> run folder."""
