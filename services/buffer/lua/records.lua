-- Audit: records of groups. ARGV: for each: book, ordinal. Reply: ok, then a record for each
local reply = { 'ok' }
for at = 1, #ARGV, 2 do reply[#reply + 1] = describe(ARGV[at], ARGV[at + 1]) end
return reply
