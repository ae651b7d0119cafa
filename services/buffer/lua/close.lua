-- CloseBook: what is finished leaves as evaluated, what is not is dropped; nothing enters afterwards.
-- ARGV: book, most groups. A book that nobody opened is closed too. Reply: ok, groups closed now | no_run
if not CFG.infra then return { 'no_run' } end
local book, counters = ARGV[1], PREFIX .. 'n:' .. ARGV[1]
call('HSET', counters, 'closed', '1')
local ordinals = call('ZRANGE', PREFIX .. 'live:' .. book, 0, tonumber(ARGV[2]) - 1)
for _, ordinal in ipairs(ordinals) do
  local group = load(book, ordinal)
  drop(group, group.state == 'open' and 'book_closed' or 'evaluated', 'close')
end
commit()
return { 'ok', #ordinals }
