-- Append one event with the next sequence number as its stream id.
-- KEYS: events, sequence. ARGV: payload, most events kept. Returns the sequence number.
local seq = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], seq .. '-0', 'event', ARGV[1])
return seq
