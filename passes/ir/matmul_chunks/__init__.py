"""Matrix products with the collectives next to them: found, cut into chunks, or replaced by one operator."""
