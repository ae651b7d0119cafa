-- Writes fields of the version ledger unless a newer epoch has written before.
-- KEYS[1] versions; ARGV[1] epoch; ARGV[2..] field, value, ... Returns the epoch in force: the caller's on success.
local known = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local epoch = tonumber(ARGV[1])
if known > epoch then
  return known
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return epoch
