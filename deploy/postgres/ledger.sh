#!/bin/sh
# Create the role and the database of Celeriac. The postgres image runs this once, while its volume is empty. The role
# owns the ledger and is not a superuser, so it cannot move the ledger's clock. pg_read_all_stats lets it see how old the
# transactions of other roles are, which keep vacuum from cleaning up (celeriac_ledger_horizon_seconds). psql reads the password itself (\getenv),
# so it is on no command line. With this search_path, SQL that names no schema finds the ledger.
set -eu
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username postgres --dbname postgres <<'SQL'
\getenv password DATABASE_PASSWORD
CREATE ROLE celeriac LOGIN PASSWORD :'password';
GRANT pg_read_all_stats TO celeriac;
CREATE DATABASE celeriac OWNER celeriac;
ALTER DATABASE celeriac SET search_path = public, celeriac;
SQL
