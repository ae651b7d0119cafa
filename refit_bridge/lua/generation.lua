-- The next generation token. KEYS[1] versions; ARGV[1] milliseconds since 1970.
-- Never below the clock: a Redis that lost its last second must not hand out a token twice.
local last = tonumber(redis.call('HGET', KEYS[1], 'generation') or '0')
local fresh = math.max(last + 1, tonumber(ARGV[1]))
redis.call('HSET', KEYS[1], 'generation', string.format('%.0f', fresh))
return fresh
