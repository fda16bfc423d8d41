"""Publishers: how an event leaves the database, one file for each kind of destination."""
