-- Release: a run gives the gym workers of its stack back; another run's assignment is left alone.
-- KEYS[1] is the stack's assignment. ARGV: run.
-- Reply: ok, serial
if call('HGET', KEYS[1], 'run') ~= ARGV[1] then
  return { 'ok', tonumber(call('HGET', KEYS[1], 'serial') or '0') }
end
call('HDEL', KEYS[1], 'run', 'gym', 'refusal')
return { 'ok', call('HINCRBY', KEYS[1], 'serial', 1) }
