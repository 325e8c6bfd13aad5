-- Tables of the ledger, from what was read of it (`stored_ledger`): every row, `place` being how
-- findings name it, and `steps`, the first row of each step.

CREATE TABLE ledger AS SELECT *, 'step ' || step AS place FROM stored_ledger;

CREATE TABLE steps AS
FROM ledger QUALIFY row_number() OVER (PARTITION BY step ORDER BY rowid) = 1;
