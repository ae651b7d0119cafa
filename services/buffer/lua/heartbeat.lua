-- Heartbeat: keeps claims alive. ARGV: worker, then for each claim: book, ordinal, sample, attempt.
-- Reply: ok, then 1 for each claim that is kept and 0 for each that is lost | no_run
if not CFG.infra then return { 'no_run' } end
local worker, reply, ids = ARGV[1], { 'ok' }, { w = {}, r = {} }
for at = 2, #ARGV, 4 do
  local i, attempt = ARGV[at + 2], ARGV[at + 3]
  local v = call('HMGET', PREFIX .. 'g:' .. ARGV[at] .. ':' .. ARGV[at + 1], 'state', 's' .. i, 'a' .. i, 'w' .. i,
    'e' .. i)
  local mine = v[1] and v[1] ~= 'dropped' and v[3] == attempt and v[4] == worker
  if mine and v[2] == 'c' then
    local list = ids[string.sub(v[5], 1, 1)]
    list[#list + 1] = string.sub(v[5], 2)
  end
  -- A sample that this very attempt has finished is not lost.
  reply[#reply + 1] = (mine and (v[2] == 'c' or v[2] == 'd')) and 1 or 0
end
for stream, list in pairs(ids) do
  for from = 1, #list, 1000 do
    local args = { STREAMS[stream], 'gym', worker, 0, unpack(list, from, math.min(from + 999, #list)) }
    args[#args + 1] = 'JUSTID'
    call('XCLAIM', unpack(args))
  end
end
return reply
