-- Fetch: which samples of a group have a payload. ARGV: book, then ordinals.
-- Reply: ok, then for each: state ('' when there is no such group), finished samples joined by spaces | no_run
if not CFG.infra then return { 'no_run' } end
local reply = { 'ok' }
for at = 2, #ARGV do
  local group, samples = load(ARGV[1], ARGV[at]), {}
  for i = 0, (group and group.n or 0) - 1 do
    if call('HGET', group.key, 's' .. i) == 'd' then samples[#samples + 1] = i end
  end
  reply[#reply + 1] = group and group.state or ''
  reply[#reply + 1] = table.concat(samples, ' ')
end
return reply
