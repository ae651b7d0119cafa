-- Ordinals for one dispatch, given once: repeating the same name returns the same range.
-- KEYS: journal. ARGV: name ("draw:STEP:ROUND"), count. Returns {first, count}.
local field = ARGV[1]
local known = redis.call('HGET', KEYS[1], field)
if known then
  local first, count = string.match(known, '(%d+) (%d+)')
  return {tonumber(first), tonumber(count)}
end
local first = tonumber(redis.call('HGET', KEYS[1], 'next_ordinal') or '0')
local count = tonumber(ARGV[2])
redis.call('HSET', KEYS[1], field, first .. ' ' .. count, 'next_ordinal', first + count)
return {first, count}
