-- Take or keep the lease of a run. KEYS: lease, epoch. ARGV: holder, ttl in ms.
-- Returns the epoch held, or -1 when somebody else holds the lease.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return -1
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if holder then
  return tonumber(redis.call('GET', KEYS[2]))
end
return redis.call('INCR', KEYS[2])
