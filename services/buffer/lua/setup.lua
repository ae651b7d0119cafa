-- Setup: budgets and admission rules of a run; the streams' consumer groups. Epoch and sequence are kept.
-- ARGV: infra, data, claim_ms, zero_variance (0 or 1), min, max_age ('' for any)
call('HSET', KEYS[1], 'infra', ARGV[1], 'data', ARGV[2], 'claim_ms', ARGV[3], 'zero_variance', ARGV[4],
  'min', ARGV[5], 'max_age', ARGV[6])
for name, reader in pairs({ work = 'gym', redo = 'gym', complete = 'admission' }) do
  local made = redis.pcall('XGROUP', 'CREATE', PREFIX .. name, reader, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP') then return made end
end
return { 'ok' }
