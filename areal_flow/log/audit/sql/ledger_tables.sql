-- Views of what was read of the ledger: its rows (`read_ledger`), and the ids that the first row of
-- each step names (`named`).

-- The first row of each step.
CREATE VIEW recorded AS
FROM read_ledger WHERE rowid IN (SELECT min(rowid) FROM read_ledger GROUP BY step);

-- What is verified: every row, and the first of each step. Rows before are of files and forks.
CREATE VIEW ledger AS FROM read_ledger WHERE step >= (SELECT first_step FROM base);
CREATE VIEW steps AS FROM recorded WHERE step >= (SELECT first_step FROM base);
CREATE VIEW consumed AS FROM named WHERE step >= (SELECT first_step FROM base);
