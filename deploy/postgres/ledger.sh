#!/bin/sh
# Run once by the postgres image, when its volume is empty: the role and the database of Celeriac. The role owns the
# ledger and is no superuser, so it cannot move the ledger's clock. The password is read by psql itself (\getenv), so
# it is on no command line.
set -eu
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username postgres --dbname postgres <<'SQL'
\getenv password DATABASE_PASSWORD
CREATE ROLE celeriac LOGIN PASSWORD :'password';
CREATE DATABASE celeriac OWNER celeriac;
ALTER DATABASE celeriac SET search_path = public, celeriac;
SQL
