-- Refuse: a gym worker cannot carry out the assignment. KEYS[1] is the stack's assignment. ARGV: serial, reason.
-- Reply: ok
if call('HGET', KEYS[1], 'serial') == ARGV[1] then call('HSET', KEYS[1], 'refusal', ARGV[2]) end
return { 'ok' }
