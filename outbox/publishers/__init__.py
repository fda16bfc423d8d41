"""Publishers: the code that sends events to a destination, one file per kind of destination."""
