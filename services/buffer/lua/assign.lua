-- Assign: what the gym workers of a stack are to do. KEYS[1] is the stack's assignment. ARGV: run, GymAssignment.
-- The serial rises with every change, and only then.
-- Reply: ok, serial
local held = call('HMGET', KEYS[1], 'run', 'gym', 'serial')
if held[1] == ARGV[1] and held[2] == ARGV[2] then return { 'ok', tonumber(held[3]) } end
call('HDEL', KEYS[1], 'refusal')
call('HSET', KEYS[1], 'run', ARGV[1], 'gym', ARGV[2])
return { 'ok', call('HINCRBY', KEYS[1], 'serial', 1) }
