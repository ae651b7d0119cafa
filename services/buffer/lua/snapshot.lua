-- Audit: the ledger after a sequence number, and the records of the groups that it touches, as of one moment.
-- ARGV: sequence number. Reply: ok, last sequence number, entries, {book, ordinal, record} of each group
local entries = call('XRANGE', PREFIX .. 'ledger', string.format('(%s-0', ARGV[1]), '+')
local seen, records = {}, {}
for _, entry in ipairs(entries) do
  local book, ordinal = entry[2][6], entry[2][8]
  local name = book .. ':' .. ordinal
  if not seen[name] then
    seen[name] = true
    records[#records + 1] = { book, ordinal, call('HGETALL', PREFIX .. 'g:' .. name) }
  end
end
return { 'ok', tonumber(call('HGET', KEYS[1], 'seq') or '0'), entries, records }
