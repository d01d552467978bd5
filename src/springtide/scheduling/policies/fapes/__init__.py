"""FaPES: placements by predicted communication time, filtered and scored on a board of free devices."""
