"""Stop requests, hangs, storage errors, stragglers and loss spikes."""
