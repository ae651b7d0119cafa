-- Admission: the rules, and what they look at. ARGV: for each group: book, ordinal.
-- Reply: ok, {zero_variance, min, max_age}, then {state, samples, step, ManifestSample...} of each | no_run
if not CFG.infra then return { 'no_run' } end
local reply = { 'ok', call('HMGET', KEYS[1], 'zero_variance', 'min', 'max_age') }
for at = 1, #ARGV, 2 do
  local group = load(ARGV[at], ARGV[at + 1])
  local row = group and { group.state, group.n, group.step } or { 'unknown', 0, 0 }
  for i = 0, (group and group.n or 0) - 1 do
    local v = call('HMGET', group.key, 's' .. i, 'm' .. i)
    if v[1] == 'd' then row[#row + 1] = v[2] end
  end
  reply[#reply + 1] = row
end
return reply
