-- Audit: the ledger after a sequence number, and the records of the groups that it touches, as of one moment.
-- ARGV: sequence number. Reply: ok, last sequence number, lines, {book, ordinal, record, ...}
local entries = call('XRANGE', PREFIX .. 'ledger', string.format('(%s-0', ARGV[1]), '+')
local seen, lines, records = {}, {}, {}
for _, entry in ipairs(entries) do
  lines[#lines + 1] = line(entry)
  local book, ordinal = entry[2][6], entry[2][8]
  local name = book .. ':' .. ordinal
  if not seen[name] and call('EXISTS', PREFIX .. 'g:' .. name) == 1 then
    for _, value in ipairs({ book, ordinal, describe(book, ordinal) }) do records[#records + 1] = value end
  end
  seen[name] = true
end
return { 'ok', tonumber(call('HGET', KEYS[1], 'seq') or '0'), lines, records }
