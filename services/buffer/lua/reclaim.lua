-- Reclaim: claims without a heartbeat go back to the queue within the infrastructure budget.
-- ARGV: outcome, most claims. Reply: ok, retried, given up | no_run
if not CFG.infra then return { 'no_run' } end
local retried, dropped = 0, 0
for _, stream in ipairs({ 'r', 'w' }) do
  local pending = call('XPENDING', STREAMS[stream], 'gym', 'IDLE', CFG.claim_ms, '-', '+', ARGV[2])
  for _, claim in ipairs(pending) do
    local found = call('XRANGE', STREAMS[stream], claim[1], claim[1])
    local fields = found[1] and found[1][2]
    local group = fields and load(fields[2], fields[4])
    local v = group and call('HMGET', group.key, 's' .. fields[6], 'e' .. fields[6], 'a' .. fields[6])
    if group and group.state == 'open' and v[1] == 'c' and v[2] == stream .. claim[1] then
      local message = 'worker ' .. claim[2] .. ' gave no heartbeat for ' .. CFG.claim_ms / 1000 .. ' s'
      local decision = fail(group, fields[6], v[3], 'infra', 'infrastructure_error', ARGV[1], message)
      if decision == 'retry' then retried = retried + 1 else dropped = dropped + 1 end
    else
      dequeue(stream .. claim[1])
    end
  end
end
commit()
return { 'ok', retried, dropped }
