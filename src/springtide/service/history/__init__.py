"""What happened, for people: events, series, pools."""
