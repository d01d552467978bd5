"""Where bytes live: durable files, and the fence that keeps writers of the past out."""
