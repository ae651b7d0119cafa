-- The group's prompt: the first one offered stays. ARGV: for each group: book, ordinal, prompt (ids, bytes).
-- Reply: ok, then the prompt that the group has, or '' when the group takes none (unknown, dropped, finished) | no_run
if not CFG.infra then return { 'no_run' } end
local reply = { 'ok' }
for at = 1, #ARGV, 3 do
  local name = ARGV[at] .. ':' .. ARGV[at + 1]
  local key = PREFIX .. 'p:' .. name
  local found = call('GET', key)
  if not found and call('HGET', PREFIX .. 'g:' .. name, 'state') == 'open' then
    call('SET', key, ARGV[at + 2])
    found = ARGV[at + 2]
  end
  reply[#reply + 1] = found or ''
end
return reply
