"""What service and clients say to each other: messages, errors, the shared page. No I/O, standard library only."""
