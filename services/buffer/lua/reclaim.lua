-- Reclaim: claims without a heartbeat go back to the queue within the infrastructure budget.
-- ARGV: outcome, most claims. Reply: ok, expired | no_run; an expired claim is
-- two elements: book, ordinal, sample, attempt and decision, joined by spaces; TraceContext
if not CFG.infra then return { 'no_run' } end
local expired = {}
for _, stream in ipairs({ 'r', 'w' }) do
  local pending = call('XPENDING', STREAMS[stream], 'gym', 'IDLE', CFG.claim_ms, '-', '+', ARGV[2])
  for _, claim in ipairs(pending) do
    local found = call('XRANGE', STREAMS[stream], claim[1], claim[1])
    local fields = found[1] and found[1][2]
    local group = fields and load(fields[2], fields[4])
    local i = fields and fields[6]
    local v = group and call('HMGET', group.key, 's' .. i, 'e' .. i, 'a' .. i, 'c' .. i)
    if group and group.state == 'open' and v[1] == 'c' and v[2] == stream .. claim[1] then
      local message = 'worker ' .. claim[2] .. ' gave no heartbeat for ' .. CFG.claim_ms / 1000 .. ' s'
      local decision = fail(group, fields[6], v[3], 'infra', 'infrastructure_error', ARGV[1], message)
      expired[#expired + 1] = table.concat({ fields[2], fields[4], fields[6], v[3], decision }, ' ')
      expired[#expired + 1] = v[4] or ''
    else
      dequeue(stream .. claim[1])
    end
  end
end
commit()
return { 'ok', expired }
