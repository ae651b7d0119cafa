-- DropOpen: every group of a book that is neither trained nor dropped. ARGV: book, reason, most groups.
-- Reply: ok, dropped now | no_run
if not CFG.infra then return { 'no_run' } end
local ordinals = call('ZRANGE', PREFIX .. 'live:' .. ARGV[1], 0, tonumber(ARGV[3]) - 1)
for _, ordinal in ipairs(ordinals) do drop(load(ARGV[1], ordinal), ARGV[2]) end
commit()
return { 'ok', #ordinals }
