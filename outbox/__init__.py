"""What must leave the database: a row in the caller's own transaction, published at least once."""
