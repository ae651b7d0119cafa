-- Audit: a part of the ledger. ARGV: first sequence number, last, most entries. Reply: ok, then lines
local reply = { 'ok' }
for _, entry in ipairs(call('XRANGE', PREFIX .. 'ledger', ARGV[1] .. '-0', ARGV[2] .. '-0', 'COUNT', ARGV[3])) do
  reply[#reply + 1] = line(entry)
end
return reply
